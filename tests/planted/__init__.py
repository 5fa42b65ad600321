"Short scripts as a researcher writes them, each with a bug that raises nothing. `test_reader.py` reads their displays."
