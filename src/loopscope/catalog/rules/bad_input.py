"""`bad_input`: router tensors that are not what they are said to be."""

from loopscope.catalog.rule import Rule
from loopscope.catalog.rules.events import of_events

EVENTS = frozenset({"weights_not_normalised", "index_out_of_range", "probabilities_as_logits"})

RULE = Rule(
    name="bad_input",
    title="Router tensors break their contract",
    bound="any weight, index or probability out of its range",
    why="never normal: the model hands over something else than it says",
    chart="health",
    judgements=(of_events(EVENTS.__contains__),),
    window="once",
    warmup=False,
)
