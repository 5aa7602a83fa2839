"""Measurements and checks that people run by hand, `python -m tools.NAME`; hex_llm imports none of them."""
