"""Communication between ranks: process start-up, parallel state, collectives, failure detection and random streams."""
