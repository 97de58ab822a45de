"""What a control plane says to the replicas of a deployment, beside what Ray hands them."""

REVISION_HEADER = "x-swiftkv-revision"
"""Header of a control plane's question for a replica's health: the revision that it wants, which strangers, who do not
know where the model lies, cannot work out."""
