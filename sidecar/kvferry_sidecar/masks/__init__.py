"""Which chunks a load needs and a save keeps, per kind of group."""
