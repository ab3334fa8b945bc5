"""The evaluators of vision, a file each; a new file here is found without being named anywhere."""

from modalities.evaluation import find_evaluators

EVALUATORS = find_evaluators(__name__)
