VALUE = "a module two folders down"
