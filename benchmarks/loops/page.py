def page(lines, found):
    return ""
