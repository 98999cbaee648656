"""Draw changes of the core at random, and measure how many the tests notice.

    python -m scripts.mutation --contexts     # once: which lines each test executes
    python -m scripts.mutation --count 150    # try a sample, and print the report

A change is tried with the tests that execute its line. Nothing is changed here: all runs are in
copies of the repository.
"""
