"""
Measurements that a person runs on a machine of theirs: `pellucid bench`.

What is measured is `pellucid serve` itself, from outside, as its clients see it and by what it says of itself.
"""
