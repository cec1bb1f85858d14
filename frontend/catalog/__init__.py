"""The model catalog: the wanted models of several servers, and how each server applies it."""
