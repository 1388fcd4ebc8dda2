"""Small tools without knowledge of learning: errors, files, random streams, workers, number formats."""
