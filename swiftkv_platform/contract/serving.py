"""Protocol between control plane and replicas, apart from what Ray passes on."""

REVISION_HEADER = "x-swiftkv-revision"
"""Header of the control plane's health requests to a replica: the revision it expects. Others cannot compute it, since
they do not know the model's location."""
