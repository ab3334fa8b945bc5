"""RULER's synthetic tasks (arXiv 2404.06654), drawn offline with the settings of its synthetic.yaml.

Templates are kept word for word, since scores depend on them. Essays are held-out documents instead of Paul Graham's.
"""

from modalities.text.ruler.base import BUDGETS, Material, Task, least_length, make_sample
from modalities.text.ruler.chains import VariableTracking
from modalities.text.ruler.counting import CommonWords, FrequentWords
from modalities.text.ruler.needles import Needles
from modalities.text.ruler.words import WORD_LISTS, load_words

__all__ = ["BUDGETS", "RULER_TASKS", "WORD_LISTS", "Material", "Task", "least_length", "load_words", "make_sample"]

RULER_TASKS: dict[str, Task] = {
    "single_1": Needles("noise", "words", "numbers"),
    "single_2": Needles("essay", "words", "numbers"),
    "single_3": Needles("essay", "words", "uuids"),
    "multikey_1": Needles("essay", "words", "numbers", num_keys=4),
    "multikey_2": Needles("needles", "words", "numbers"),
    "multikey_3": Needles("needles", "uuids", "uuids"),
    "multivalue": Needles("essay", "words", "numbers", num_values=4),
    "multiquery": Needles("essay", "words", "numbers", num_keys=4, num_queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
}
