"""The broker: the ledger of all work, the weight-update protocol, and the sockets around them."""
