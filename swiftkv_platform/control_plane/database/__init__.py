"""Jobs, events, metrics, models and deployments in a relational database. Knows no HTTP, no Ray and no object store."""
