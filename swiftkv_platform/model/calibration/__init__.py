"""Calibrated initialization: closed-form SwiftKV projections from the teacher's own activations.

Copied teacher weights get the wrong input: layer i >= l expects its own hidden state, and SwiftKV gives it
h = norm_swiftkv(x). Here each upper layer's projections of its hidden state are regressed on h, and the layers of an
AcrossKV group are then merged: by head in `heads`, latents in `latent`. The exit head starts as the language
model's head applied to the final hidden state predicted from x, not to x itself.

It takes one forward pass of the teacher, layer by layer (`stream`), and all sums are Gram matrices in float64, which
add up over rows and workers. `rounding` runs a student in the same way to round its weights to integers.
"""

from swiftkv_platform.model.calibration.regression import LayerSource, TokenBatch
from swiftkv_platform.model.calibration.stream import calibrate, calibrate_layerwise

__all__ = ["LayerSource", "TokenBatch", "calibrate", "calibrate_layerwise"]
