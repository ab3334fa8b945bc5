"""DNA: the causal decoder of text on single bases, k-mers or BPE; its data, its evaluators."""
