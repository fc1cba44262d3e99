"""Characters that look alike, or that nobody sees, made plain."""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = {c: str(i) for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {"⁻": "-", "⁺": "+", "ⁿ": "n"}
_SUBSCRIPTS = {c: str(i) for i, c in enumerate("₀₁₂₃₄₅₆₇₈₉")}
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_LOOKALIKES = str.maketrans(
    {
        **{chr(0xFF01 + i): chr(0x21 + i) for i in range(94)},  # full-width forms
        "−": "-", "–": "-", "﹣": "-", "－": "-", "＋": "+", "×": "*", "·": "*", "⋅": "*", "∙": "*",
        "÷": "/", "⁄": "/", "∕": "/", "≦": "≤", "≧": "≥", "⩽": "≤", "⩾": "≥", "≅": "≈", "≃": "≈",
        "∶": ":", "：": ":", "，": ",", "；": ";", "（": "(", "）": ")", "［": "[", "］": "]",
        "｛": "{", "｝": "}", "＝": "=", "＜": "<", "＞": ">", "％": "%", "．": ".", "。": ".",
        "º": "°", "√": "\\sqrt ", "∞": "∞", "⇒": "→", "⟹": "→", "∣": "|", "⋯": "…", "′": "'",
        "’": "'", "½": "\\frac{1}{2}", "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}",
        "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⅕": "\\frac{1}{5}", "⅛": "\\frac{1}{8}",
        "⟦": " ", "⟧": " ", "⦃": " ", "⦄": " ", "⏎": " ", "ℝ": "\\mathbb{R}", "𝜋": "π", "＄": "\\$",
        "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u3000": " ", "、": ",",
    }
)  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def plain_characters(text: str) -> str:
    """ASCII for what looks like it; invisible, directional and control characters are gone."""
    if text.isascii() and not _CONTROL.search(text):
        return text
    kept = []
    for character in text:
        if character.isascii():
            kept.append(character if character.isprintable() or character in "\n\t" else " ")
            continue
        category = unicodedata.category(character)
        if category in ("Cf", "Cs", "Co", "Mn", "Cc"):
            continue
        kept.append(str(unicodedata.digit(character)) if category == "Nd" else character)
    text = "".join(kept)
    text = _RAISED.sub(lambda m: "^{" + "".join(_SUPERSCRIPTS[c] for c in m[0]) + "}", text)
    text = _LOWERED.sub(lambda m: "_{" + "".join(_SUBSCRIPTS[c] for c in m[0]) + "}", text)
    return text.translate(_LOOKALIKES)
