"""The text that benchmarks run on, written for this package (no third party's words), and how it becomes ids.

Real sentences, because a prompt of one repeated token makes attention and next-token choice unlike use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from larql_kv.errors import ModelError

if TYPE_CHECKING:
    from larql_kv.model.model import Model

TEXT = """\
The harbour town of Elmsea has kept a tide book since the year the first pier was built. Each morning a \
clerk walks to the end of the stone wall, reads the painted scale, and writes down the height of the \
water, the direction of the wind, and whatever else seems worth a line. Most days that is nothing at \
all. On other days the book tells of a whale in the outer basin, of a ship that came in without its \
mast, or of two brothers who swam to the light and back because of a bet about a loaf of bread.

For a long time nobody asked what the book was good for. The numbers were copied once a year, sent to \
the capital, and forgotten there. Then a young teacher named Ilse Brandt borrowed the oldest volume for \
a lesson on averages. Her pupils added up a whole winter of readings by hand and found that the mean had \
risen by the width of a thumb since their grandparents had gone to school. They did not believe it, so \
they did the sums again, this time in pairs, each checking the other. The answer stayed the same.

What happened next shows how a measurement becomes useful. The first reaction of the council was that \
the scale must have moved. A surveyor was hired; he compared the scale with three marks cut into the \
rock above the harbour and reported that it had sunk by less than a finger's breadth. The second \
reaction was that the early clerks had been careless. So the pupils looked for storms that were also \
described in letters and newspapers, and for every one of them the book had the right day and the right \
order of heights. Only then did the council ask the question that it should have asked at the beginning: \
if the numbers are true, what should we do?

There were four proposals. The fishermen wanted a higher wall. The merchants wanted to move the \
warehouses up the hill, which would cost more at once but less in the long run. The baker, whose cellar \
had been flooded twice, wanted pumps. Ilse Brandt wanted another ten years of readings, taken twice a \
day instead of once, because a single reading in the morning says little about the height at noon. In \
the end the town did a little of everything, as towns do, and wrote down why. The reasons fill eleven \
pages at the back of volume nine.

A visitor who reads these pages today will notice how careful the arguments are. Nobody claims to know \
the future. The engineer gives a range and says which end of it he would bet on; the doctor adds that a \
wet cellar is a matter of health as well as of money; the priest reminds everyone that the poorest \
street is also the lowest one. When two figures disagree, both are printed, with the name of the person \
who measured each. It is not a beautiful text, but it is an honest one, and it was written by people who \
expected to be checked.

The tide book is still kept. The painted scale has been replaced by a float in an iron tube, and a small \
machine sends the level to a screen in the library every five minutes. Yet the clerk walks out all the \
same, with a pencil behind her ear, because the machine has no column for whales. Last spring she wrote: \
"Fog until ten. Water 2.31 m, wind north-east, 4. Machine says 2.29. I trust the stone." Underneath, in \
another hand, someone had added: "Checked. Float was dirty. 2.31 is right."

Children in Elmsea learn the story early, and they draw different lessons from it. Some want to become \
engineers. Some only remember the bet about the bread. One boy of nine, when asked what the book was \
for, thought for a while and said that it was for people who are not born yet, so that they can argue \
with us.
"""


def text_ids(model: Model, count: int, text: str | None = None) -> list[int]:
    """Exactly `count` ids of `text` (default: `TEXT`), repeated as often as needed, the model's own
    start tokens at the beginning only. Raises ModelError where the text has no ids to repeat."""
    text = TEXT if text is None else text
    tokenizer = model.tokenizer
    ids = tokenizer.encode(text)
    body = tokenizer.encode(text, add_special=False)
    if len(ids) < count and not body:
        raise ModelError(f"the text {text[:40]!r} has no tokens, so {count} of them cannot be made")
    while len(ids) < count:
        ids += body
    return ids[:count]
