"""Experiment tracking with Weights & Biases, in addition to a job's events. Independent of Ray and the control
plane."""
