"""How hypothesis runs here: the same examples each time, and no limit on time."""

from hypothesis import settings

# `pytest --hypothesis-profile=explore` looks for new examples instead.
settings.register_profile("repeat", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeat")
