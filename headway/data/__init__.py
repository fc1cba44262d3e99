"""Where a job's prompts come from, and the order in which they are asked."""

from headway.data.source import Row, Source, open_source
from headway.data.stream import Cursor, PromptStream

__all__ = ["Cursor", "PromptStream", "Row", "Source", "open_source"]
