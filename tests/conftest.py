"""How hypothesis runs here: the same examples each time, and no limit on time."""

from hypothesis import HealthCheck, settings

# `pytest --hypothesis-profile=explore` looks for new examples instead.
settings.register_profile(
    "repeat",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # a machine may be busy with other things
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeat")
