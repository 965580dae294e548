"""The text that `larql check` runs when it is given none: written for this package, in the public domain."""

from __future__ import annotations

TEXT = """\
The harbour at Ellsworth had been closed for three winters before anybody thought to count the boats. When
Mara finally walked the length of the quay with a notebook in her coat pocket, she found forty-one hulls,
nine of them under water, and a lighthouse keeper who had not been paid since the spring of 1911. He made
her tea on a paraffin stove and told her what he knew, which was a good deal about weather and nothing at
all about money.

"You will want the ledger," he said. "Everyone who comes here wants the ledger."

There was no ledger. There had been one, a tall green book with brass corners, in which the harbour master
wrote down every vessel that came in, what it carried, what it paid, and when it left again. The trouble was
that he trusted his memory more than his handwriting. On busy days he wrote nothing until the evening, and
by then the herring boats had changed places twice. So the book and the harbour drifted apart, a little more
each season, until the two described different towns. When the company in the city asked which of them was
right, nobody could say.

Mara's method was simpler. She walked the quay every morning and wrote down what she saw. She did not write
what she expected, nor what was there the day before, nor what the skipper promised would be there by noon.
If a boat was gone, it was gone; if it lay on the bottom, she wrote that it lay on the bottom, and how deep.
After a month she could tell at a glance which moorings were used and which were only paid for, and after
three she could tell something more surprising: half of the harbour's dues came from boats that no longer
existed.

Consider what it takes to keep such a record honest. First, every entry must be made at the time, by the one
who looked. Second, an entry once made may be corrected but never erased, so that a reader can see both what
was believed and what was later found. Third, somebody other than the writer must be able to check it, by
walking the same quay on the same morning with an empty notebook. The third rule is the one that matters. A
record that nobody can check is a story, and people are very good at stories.

The keeper listened to all of this with his head on one side. "And the light?" he asked. "Who checks that the
light was lit?"

She had not thought about the light. It burned from dusk to dawn, as it had for sixty years, and the ships
that passed safely left no trace of having done so. That was the difficulty with lights: when they work,
nothing happens. They talked about it until the tea was cold. In the end they agreed that he would write down
the hour at which he lit the lamp and the hour at which he put it out, together with the oil it used, measured
in the morning with a marked stick. Oil cannot be argued with. If the lamp burned for ten hours, then between
4.2 and 4.6 litres were gone; if the stick said otherwise, the book was wrong, whoever had written it.

By the following autumn the town had a different opinion of itself. The nine sunken boats were raised, seven
were broken up for timber, and two, to the astonishment of everyone but the keeper, floated. The company sent
a young man with a leather case to find out why the income had fallen while the trade had grown. He stayed a
week. On the last evening he asked to see the ledger, and Mara handed him a stack of school notebooks tied
with string, one for each month, the pages swollen with salt and rain.

He read for a long time. Then he asked the question that she had been waiting for: how could he know that any
of it was true?

"Get up early," she said, "and bring a pencil."
"""
