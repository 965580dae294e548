"""Measuring engines on a real model: speed, bytes, promises. `larql bench` shows it."""
