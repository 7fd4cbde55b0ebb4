"""What tdnn costs, beside plain torch and beside tensordict, measured in one run.

Every benchmark is written once, as a function that builds the work for a library that it is given:

- ``pytest benchmarks --benchmark-enable`` times it with pytest-benchmark, under its listed name;
- ``python -m benchmarks.compare`` times it on tdnn, tensordict and plain torch alternately.
"""
