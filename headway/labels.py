"""Labels that people and models write, as they are compared. Standard library only, for workers."""


def label_key(text: str) -> str:
    """A label as it is compared: case, blanks, marks and dots around it ignored."""
    return text.strip(" \t\r\n*_`\"'.:!()[]").casefold()
