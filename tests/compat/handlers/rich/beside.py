VALUE = "a module beside the handler"
