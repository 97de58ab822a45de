"""The control plane's HTTP interface. Wires orchestration to database, cluster and storage; decides nothing itself."""
