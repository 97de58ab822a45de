"""Jobs from queue to artifact: states, validation, the reconciler. Knows no database, no Ray, no HTTP and no torch."""
