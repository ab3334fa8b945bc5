"""What classifiers of grids share, whatever the grid shows: a transformer over square patches of
(in_chans, height, width), its batches, its loss, and evaluators at other sizes than training's.

Images are one such modality (`modalities.vision`). Another, such as audio by its spectrograms, is
made of five things. None of them imports another modality.

1. **Model.** A frozen dataclass derived from `config.GridConfig`: it adds fields for the size of
   its training samples and gives them as `train_size`, (height, width) in cells. A class derived
   from `model.GridTransformer` with `config_class` and `modality`; for `priorzoo predict` also
   `classify(path, *, size=None)`, which reads a file and returns `self.name_classes(logits)`. Named
   models are a `zoo.catalog.ModelFamily` with `zoo.methods.list_grid_positions` as its methods.

       @dataclass(frozen=True)
       class AudioConfig(GridConfig):
           mels: int = bounded(64, 1, 1024)
           frames: int = bounded(128, 1, 2**16)

           @property
           def train_size(self):
               return self.mels, self.frames

       class AudioTransformer(GridTransformer):
           config_class = AudioConfig
           modality = "audio"

2. **Source.** A class derived from `items.ItemSet`: how many items there are, `read(index)` →
   (item, label), `name`, and `group` for items that are no independent measurements, such as clips
   of one speaker. What cannot be read raises `items.BadSample(reason, detail)`: it is skipped,
   counted and reported. A source without a held-out part takes `items.split_places` of its names.

3. **Batches.** A frozen dataclass derived from `config.GridData`, the recipe's data section, with
   `train_shapes`. A class derived from `batches.GridBatches`: `sample(item, label, shape)` →
   (array, {"targets": label}), in which Python's, numpy's and torch's global generators are seeded
   for the sample; `tensor(arrays)`, which normalises a whole batch; perhaps `inputs`, another name
   of the grids in a batch. The loaders, for training and for held-out data, resume exactly:

       IndexedLoader(ItemSamples(items, AudioBatches(data), train=True, seed=data.seed),
                     micro_batch, rank=rank, world=world, num_workers=data.num_workers)

4. **Evaluators.** A class derived from `accuracy.SizeAccuracy`: accuracy at every size, with the
   controls that show whether a larger grid is worth reading. It gives `heldout`, a
   `modalities.loading.Heldout` whose items derive from `items.HeldoutItems` (which asks for
   `side`, the size that an item reaches), and `grid(model, item, shape, control)`, what the model
   reads. `grows = "width"` keeps the height and counts a size in columns. Other measurements derive
   from `evaluation.SizeEvaluator`, which knows the sizes and writes the table of controls. Give
   `SizeSettings` a field `sizes` of your own where its help text should name your cells.

5. **`modalities.contract.Modality`**: `build` makes a named model at the data's size and classes;
   `training.loss`, `training.weight` and `training.cost` are the rest, with
   `metrics=training.METRICS`. Where batches have another name for the grids, the loss is
   `training.classification_loss(logits, targets)`.

`examples/audio` has all five in a package that pip installs. `config` and `items` import neither
timm nor torch's transforms, so that names can be listed without them. All else needs timm, which is
in the extra `vision`.
"""
