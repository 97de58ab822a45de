"""The local platform: Ray and a control plane on this machine, for `swiftkv up|down|status` and the demo."""
