"""Ansible, with the modules of its collection amazon.aws."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "Ansible",
    "ansible",
    lacks=("ranges", "multipart", "copy", "checksums", "conditions", "presigned", "virtual host"),
    also="tags and versioning of buckets; `s3_object` asks for AES256",
)


@works("put", "get", "list", "delete", "buckets", "metadata")
def test_a_playbook_makes_buckets_and_objects_and_changes_nothing_the_second_time(gateway: Gateway) -> None:
    said = gateway.shell(
        "Ansible",
        """
        echo content > file
        cat > play.yml <<END
        - hosts: localhost
          gather_facts: false
          module_defaults: {group/aws: {endpoint_url: "$AWS_ENDPOINT_URL"}}
          tasks:
          - amazon.aws.s3_bucket: &bucket {name: of-ansible-2, tags: {team: a}, versioning: true}
          - amazon.aws.s3_bucket: *bucket
            register: again
          - amazon.aws.s3_object: &put
              {bucket: of-ansible-2, object: k, src: file, mode: put, metadata: {a: "1"}, permission: []}
          - amazon.aws.s3_object: {bucket: of-ansible-2, object: k, dest: "$PWD/back", mode: get}
          - amazon.aws.s3_object_info: {bucket_name: of-ansible-2, object_name: k}
            register: found
          - amazon.aws.s3_object: {bucket: of-ansible-2, object: k, mode: delobj}
          - amazon.aws.s3_bucket_info: {name: of-ansible-2}
            register: listed
          - amazon.aws.s3_bucket: {name: of-ansible-2, state: absent, force: true}
          - assert:
              that:
              - not again.changed and again.tags.team == "a" and again.versioning.Status == "Enabled"
              - found.object_info[0].object_data.metadata.a == "1"
              - listed.buckets | map(attribute="name") | list == ["of-ansible-2"]
        END
        ansible-playbook play.yml 2>&1
        cmp file back
        """,
    )
    assert "failed=0" in said
