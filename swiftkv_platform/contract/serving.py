"""Words between a control plane and the replicas of a deployment, beside those that Ray hands on."""

REVISION_HEADER = "x-swiftkv-revision"
"""Header of a control plane's question for a replica's health: the revision that it wants, which strangers, who do not
know where the model lies, cannot work out."""
