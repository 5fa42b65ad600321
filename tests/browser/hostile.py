"Text of a model that would like to be more than text, and what shows that it stayed text. Kernels import it, too."

from __future__ import annotations

from dataclasses import replace

from synthetic import synthetic_record

from rl_notebook.runs.records import StepRecord

OPENING = "first words"
CLOSING = "last words"
BAD = (
    "\x1b[1m\u202e"
    "</script><script>window.pwned = 'script'</script>"
    "<img src=x onerror=\"window.pwned = 'image'\">"
    "<svg onload=\"window.pwned = 'svg'\"></svg>"
    "<iframe srcdoc=\"<script>parent.pwned = 'frame'</script>\"></iframe>"
    "<a href=\"javascript:window.pwned = 'link'\">pwned</a>"
    "</td></table></div></textarea></style><style>body { display: none }</style>"
    "\x1b[31mred\x1b[0m\x1b]0;title\x07"  # escape codes of terminals
    "\u202eright to left\u202c\u2066isolated\u2069\u200b"  # marks of direction, and a space without width
    "${window.pwned = 'template'}{{window.pwned}}%3Cscript%3E&lt;script&gt;"
)
SHORT_TEXT = f"{OPENING} {BAD} {CLOSING}"
LONG_TEXT = f"{OPENING} {BAD} {'0123456789' * 10_000} {CLOSING}"

# Nothing ran, nothing is hidden, and no element is made of what the text holds as markup.
HARM = """() => {
    const hasHandler = e => [...e.attributes].some(a => /^(on|src|href)/.test(a.name) && a.value.includes('pwned'));
    const script = e => e.tagName === 'SCRIPT' && /^window.pwned/.test(e.textContent);
    const image = e => e.tagName === 'IMG' && e.getAttribute('src') === 'x';
    const style = e => e.tagName === 'STYLE' && /^body { display/.test(e.textContent);
    const elements = [...document.querySelectorAll('*')].filter(e => hasHandler(e) || script(e) || image(e) || style(e));
    return {
        pwned: String(window.pwned),
        elements: elements.map(e => e.outerHTML.slice(0, 120)),
        hidden: getComputedStyle(document.body).display === 'none',
    };
}"""
HARMLESS = {"pwned": "undefined", "elements": [], "hidden": False}


class HostileTokenizer:
    "Says something hostile for every sign that is no digit."

    def decode(self, ids: list[int], **_: bool) -> str:
        return "".join(chr(i) if chr(i).isdigit() else BAD for i in ids)


def hostile_record(step: int = 1, text: str = SHORT_TEXT) -> StepRecord:
    "A step whose every text, name and reason is hostile."
    record = synthetic_record(step, groups=2, completions=4)
    groups = [
        replace(
            group,
            samples=tuple(
                replace(s, text=text, finish_reason=BAD, rewards={BAD: s.reward})
                for s in group.samples
            ),
            key=BAD,
            row={"question": text, "answer": BAD},
        )
        for group in record.groups
    ]
    named = {f"rewards/{name}/{part}": 0.5 for name in (BAD, "other") for part in ("mean", "std")}
    return replace(
        record,
        groups=groups,
        options={**record.options, "note": BAD},
        metrics={**record.metrics, **named},
    )
