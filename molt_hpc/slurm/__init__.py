"""The life cycle of a run: topology, process launchers, supervisor."""
