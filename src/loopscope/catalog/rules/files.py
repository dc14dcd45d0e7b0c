"""`files`: damage to the run's files, which whoever reads the run finds; no row says it."""

from loopscope.catalog.rule import Rule, RuleCheck

RULE = Rule(
    name="files",
    title="Files of the run cannot be read as they should",
    bound="every part and journal is there, whole, and of a known schema",
    why="what cannot be believed is left out of every number here, never guessed",
    chart="files",
    window="once",
    warmup=False,
    check=RuleCheck(title="The run's files are whole", bound="no problem", missing=""),
)
