"""Ray and a control plane on this machine: started, watched and stopped for `swiftkv up|down|status` and the demo."""
