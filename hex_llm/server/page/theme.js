// Sets the chosen theme before the first paint; without a choice the system's counts.
// The only script that is no module: a module would run too late.
document.documentElement.dataset.theme = localStorage.getItem("hex.theme") ?? "";
