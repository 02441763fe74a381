"""The parts of ``python -m experiments.bench``."""
