// Package test is the wing for tests that are not beside the code that they test: fakes of a
// driver, of a kubelet and of the service manager, the simulation under virtual time, the
// benchmark, checks of the repository's own text and imports, and, in modules of their own so that
// their dependencies never reach the program, tests of whole systems (e2e). Nothing of it is
// shipped but the sample driver, which has a package of its own. It may import everything.
//
// Begin with README.md, which says which test owns which promise, and fake.
package test
