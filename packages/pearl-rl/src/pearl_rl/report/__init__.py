"""What people see of a run: a page, a timeline, plots. Reads run folders; never touches a running job."""
