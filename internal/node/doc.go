// Package node is the wing for what is known about a node and its kubelet: the configuration, paths
// below the kubelet's root directory, the contents of its plugins_registry, volumes, Kubernetes
// distributions, and the types that describe a driver's registration. Its packages read and
// describe; they register nothing and make no decision. It imports sys.
//
// Begin with status, whose types all other wings share, and config, which turns the files into one
// immutable Config or into errors that each name their place.
package node
