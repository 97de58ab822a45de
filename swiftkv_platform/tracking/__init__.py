"""Experiment tracking: where a run's metrics go beside the job's own events. Knows no Ray and no control plane."""
