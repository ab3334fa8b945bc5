"""Where the corpora come from, and how each becomes files of the data folder
(`priorzoo fetch-data`)."""
