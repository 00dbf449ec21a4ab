"""Real server, controllers, agents and ranks; every fault is made for real."""
