"""Files of an attempt in the object store: events, stop requests, checkpoints, prepared data, tracking files."""
