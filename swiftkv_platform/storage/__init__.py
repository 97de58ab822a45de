"""Objects, artifacts and the attempt channel in a directory or a bucket. Knows no torch, no Ray and no database."""
