"""torch-model-archiver: packs the files of a model into an archive."""
