"""torch-model-archiver and torch-workflow-archiver: pack files into an archive."""
