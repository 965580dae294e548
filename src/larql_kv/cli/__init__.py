"""The `larql` command line. stdout carries what was asked for (model text, tables, JSON); everything else,
warnings and timings included, goes to stderr."""
