"""Shapley values of neighbours' messages: coalitions, value functions and trust."""
