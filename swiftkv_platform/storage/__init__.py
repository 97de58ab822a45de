"""Objects, artifacts and the attempt channel on a directory or on S3. Knows no torch, no Ray and no database."""
