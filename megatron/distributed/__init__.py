"""Who talks to whom: process start-up, parallel state, collectives, shards and random streams."""
