"""Objects, artifacts and the files of attempts, in a directory or a bucket. Knows no torch, no Ray and no database."""
